"""A run's state on disk: whole or not there at all, checked byte by byte, readable on any number of ranks.

disk      the few things done to a disk, in one place, so that tests can fail any one of them
shard     one rank's tensors in one safetensors file: hashed while written, checked while read
manifest  what makes a folder a checkpoint: its parts, their sizes and hashes; reading and checking it
threads   the same work on many things, by several threads
host      copies of tensors in the host's memory, in room that is kept
pieces    a rank's slice of a named whole tensor, and whether slices make whole tensors
commit    how many ranks write one checkpoint that appears at once, or not
save      Piece, Snapshot, Saver: saving in the background, one save in flight, failures told at the next call
load      the newest whole checkpoint, and any slice of any tensor out of it
keep      the settings, and which checkpoints stay
folder    the checkpoints that a folder holds: those that are whole, those that go, what was left half-done
model     the run's model folder in Hugging Face's layout, swapped in whole
lock      one run per folder

A checkpoint is a folder ``checkpoints/step-000100`` that every rank can see. Each rank writes
``rank-000.safetensors`` and ``rank-000.json`` (which slice of which tensor lies where, with a hash of each) into
``tmp-…``; when all are there, rank 0 writes ``manifest.json``, makes everything durable and renames the folder. Nothing
is ever written in place, and nothing older is removed before the new one is durable. The hashes (XXH3, 128 bits) are
there against accidents: a flipped bit, a cut file, a zeroed block. They are not a signature. Nothing reads a pickle.
"""

"""Formats on disk: what a file holds, read in pieces, and refused in one sentence where it is damaged.

megatron  token shards, .bin and .idx: memory-mapped reader, streaming writer, full check
sidecar   what stands beside a shard: whose ids they are, checksums, what went in
"""

"""From token shards to batches: what a row holds is a pure function of its number.

tokenizer  text to ids and back, from every kind of tokenizer file
store      token shards as one stream of documents, read at any position
split      training and validation: which documents belong to which
order      the order of samples: a permutation computed, never stored
mixture    which source a sample comes from, where several are mixed by weight
pack       rows cut from a stream, with their labels, and stacked into a batch
sizes      how many rows each update has: the same all along, or growing by a ramp
source     the batches of a run, built ahead; the settings that say so
"""

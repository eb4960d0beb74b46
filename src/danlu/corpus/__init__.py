"""Raw files to token shards: once, in a cache keyed by all that determines the ids.

tokenise  raw files to shards: found, read, encoded, kept
entries   the cache: what a shard is kept under, whole or not at all
batches   documents, cut and gathered into batches to encode
encoders  the processes that encode them, or this one
"""

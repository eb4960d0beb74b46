"""Formats on disk: what a file holds, read in pieces, and refused in one sentence where it is damaged.

raw       any raw file by its kind; the files that paths, folders and globs name
document  what a raw file gives: documents, and rejects where a record is bad
stream    the bytes of a raw file, plain or gzip, whole or line by line
text      plain text: strict UTF-8, one document, paragraphs or lines
jsonl     one JSON object a line
parquet   one column of a Parquet file
megatron  token shards, .bin and .idx: memory-mapped reader, streaming writer, full check
sidecar   what stands beside a shard: whose ids they are, checksums, what went in
"""

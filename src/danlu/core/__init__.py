"""The words that every room speaks: batch, terms, report, contracts, config, facts about devices.

batch      one micro-batch of rows, packed, with its labels, positions and documents
terms      named sums; a loss is the ratio of two of them
report     what one step came to
contracts  Output, Head, Objective, Source, Hook, Signal: what rooms ask of each other
config     settings: typed dataclasses from YAML, overridden and saved; every mistake named with its line
nodes      settings as they were written: texts with their lines, from files and from the command line
fields     what the fields of settings take, in types and in words
schema     from what was written to typed settings; every mistake kept
errors     the failures a user is told of, each with its exit code
limits     how much memory the process was allotted
device     kinds of device, dtypes, peak FLOP/s, bytes per second, watts
heap       freed host memory is kept for the next tensor
world      rank, seeds, process start and end; the only reader of the environment
words      bytes and seconds, in words
log        one line per fact, from the right rank
paths      what a run folder holds, and writing a file whole or not at all
"""

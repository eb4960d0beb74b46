"""Text out of a model: a forward and a head are handed in, ids come out, one step at a time.

cache   keys and values of what was read, in memory taken once
pick    the next token of its scores: temperature, top-k, top-p, greedy
engine  many prompts in one batch go on, until each has ended
text    ids to text as they come, never half a character
"""

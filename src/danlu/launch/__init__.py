"""Starting ranks.

local      ranks on this machine, by torchrun's own launcher
"""

"""A run, whole and typed: one choice from each room, its YAML files, and other tools' names for it.

recipe     Recipe and BatchSize, what must hold between their settings, and what a resumed run may change
yaml       recipes are found by name or path, read, completed and saved
shelf      the recipes that come with danlu, in shipped/
names      what other tools call our settings
planned    what is known and not built yet, so refused
"""

"""Tokenizers: text to ids, whatever file they come in.

tokenizer  the object: encode, document, decode, save, fingerprint
engines    what turns text into ids: one class a library
control    which control tokens end, begin and pad
forms      other forms of a tokenizer, written as what tokenizer.json is the text of
build      making a tokenizer of a form and of what the files beside it say
source     finding out what a path holds, and making a tokenizer of it
training   learning a byte-level BPE from texts
fertility  how many tokens a tokenizer needs for text, script by script
"""

from danlu.data.tokenizer.source import load
from danlu.data.tokenizer.tokenizer import FILES, Tokenizer
from danlu.data.tokenizer.training import train

__all__ = ["FILES", "Tokenizer", "load", "train"]

"""Farstate: how far does the state of a recurrent language model carry?"""

__version__ = "0.1.0"

"""Prompt → segments: find chunks by their text, tokenise each part, tile the prompt."""

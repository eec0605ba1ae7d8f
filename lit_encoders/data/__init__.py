"""Data: text in, packs of token ids with document boundaries out."""

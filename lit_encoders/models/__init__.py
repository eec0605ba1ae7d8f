"""Models: Hugging Face language models that read packs of documents."""

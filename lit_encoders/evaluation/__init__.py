"""What an encoder is good for: embeddings of texts, and what can be read off them."""

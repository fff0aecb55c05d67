"""Models and tokenizers, the attention over ragged tokens, log-probs in chunks, adapters, value
heads."""

"""A trained model as a HuggingFace folder, with its model card, on disk and on the Hub."""

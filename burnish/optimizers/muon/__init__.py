"""Muon for the matrices of decoder layers, AdamW for the rest."""

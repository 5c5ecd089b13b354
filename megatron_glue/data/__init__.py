"""Floor 4: documents, tokens and packs."""

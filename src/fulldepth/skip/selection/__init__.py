"""Which blocks go: variants run with what they share, the ledger of what is known, the searches that ask it."""

"""Floor 5: mixture-of-experts layers."""

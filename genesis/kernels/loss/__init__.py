"""Cross-entropy over given logits, and fused with the language model head."""

"""Cross-entropy of given logits, and fused with the language model head."""

"""GEMMs of 2-byte floats, float32 (tf32), e4m3 and integers, and the ops that are fused into their epilogues."""

"""What generation launches: matmuls of few rows, attention of one token, sampling. README.md says which runs when."""

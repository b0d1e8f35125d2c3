"""Tests of the tape and of what users do with it."""

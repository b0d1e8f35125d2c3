"""What an op costs and why: inputs made from a shape, measurements, the roofline, and the report of them."""

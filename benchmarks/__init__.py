"""What the figures in the README come from: ratios, both sides measured in turn in one run."""

"""One's own model: `farstate diagnose` and `farstate repair`, which write parameters and run the repository's rules on them."""

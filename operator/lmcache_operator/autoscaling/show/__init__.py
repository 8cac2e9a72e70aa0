"""Miss-ratio curves for people: in the terminal, and as SVG. Pure."""

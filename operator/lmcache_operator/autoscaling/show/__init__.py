"""Miss-ratio curves for people, as text. Pure."""

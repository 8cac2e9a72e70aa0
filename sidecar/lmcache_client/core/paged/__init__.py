"""Parts for engines that look up, load and store whole pages on threads of their own."""

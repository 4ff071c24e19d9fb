"""One small module per host; each imports its library, an optional extra of this package."""

"""Images and audio that belong to rows: found in a source, kept once by their digest, counted in tokens, and decoded where they are needed."""

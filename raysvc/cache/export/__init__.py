"""An entry in the formats of other tools."""

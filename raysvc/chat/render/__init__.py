"""Messages to text, with the spans that each message owns."""

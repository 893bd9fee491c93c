"""What a layout means: pure data and arithmetic, without ranks."""

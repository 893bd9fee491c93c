"""What every file stands on: ambient state, trees, messages, source lines, linear maps."""

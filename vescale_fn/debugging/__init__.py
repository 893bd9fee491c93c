"""Looking at a program: layouts, communication, a profile, and `check` against one device."""

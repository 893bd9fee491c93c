"""Everything internal that is not behind one public name: eight folders, each of which imports only those below it."""

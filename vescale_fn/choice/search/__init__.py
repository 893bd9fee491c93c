"""The best layouts of a recorded step, found: the choices of each call, what they cost, and an integer program over them."""

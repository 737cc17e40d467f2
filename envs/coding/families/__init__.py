"""The families of problems by theme. A family is a reference function with one parameter."""

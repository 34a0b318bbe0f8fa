"""Moonshard as a package of Python: the program `moonshard`, its libraries and its recipes. There is nothing to import."""

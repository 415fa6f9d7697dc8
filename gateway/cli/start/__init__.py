"""The first hour of a user: a file served as it is, served anew at each change, and made from nothing."""

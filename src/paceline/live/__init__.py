"""The live page: runs followed from their files, and a server that shows them."""

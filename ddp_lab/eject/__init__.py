"""The same run as one file of plain PyTorch: templates, and what fills them in."""

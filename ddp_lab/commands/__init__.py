"""The commands of `ddp-lab`, one file each: `main` gets the arguments after the command's name.

No command imports another one, and none imports torch at the top: --help and most errors do not
need it.
"""

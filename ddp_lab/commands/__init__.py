"""The commands of `ddp-lab`, one file each: its arguments, and `main`, which reads them from sys.argv.

No command imports another one, and none imports torch at the top: --help and most errors do not need it.
"""

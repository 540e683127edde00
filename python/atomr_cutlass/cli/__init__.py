"""The command line `atomr-cutlass`."""

"""Says where bytes lie: local disk, NFS, S3 and every fsspec store."""

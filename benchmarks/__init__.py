"""The measurements that the performance page quotes: programs that anyone can run."""

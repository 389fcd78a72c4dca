"""What ``understudy tune`` searches with: turns and intervals, and servers under load."""

package cgroup

// Mounts is where mountinfo says that cgroup2 is mounted; Choose takes one.
var (
	Mounts = mounts
	Choose = choose
)

// Runtime is runc for hosts on which even root lacks a capability: kind's nodes
// are privileged containers, for which Docker asks for every capability that it
// knows, and runc then fails. What the host does not have is taken out of the
// request before runc sees it, and what Docker does not know (Debian's: nothing
// newer than CAP_AUDIT_READ, so not CAP_BPF) is added. RUNC names the runc to run (default: from PATH).
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// capabilities by number (linux/capability.h).
var capabilities = strings.Fields(`CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP
	LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT
	SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE
	AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF
	CHECKPOINT_RESTORE`)

func main() {
	err := run(os.Args[1:])
	fmt.Fprintln(os.Stderr, "runtime:", err)
	os.Exit(1)
}

// run ends as runc, or returns why it cannot.
func run(args []string) error {
	var err error
	switch command, file := request(args); command {
	case "create", "run":
		err = edit(filepath.Join(cmp.Or(file, "."), "config.json"), "process")
	case "exec":
		if file != "" {
			err = edit(file)
		}
	}
	if err != nil {
		return err
	}
	runc, err := exec.LookPath(cmp.Or(os.Getenv("RUNC"), "runc"))
	if err != nil {
		return err
	}
	return syscall.Exec(runc, append([]string{"runc"}, args...), os.Environ())
}

// request is runc's command, and what it says of the bundle or the process.
func request(args []string) (command, file string) {
	for i := 0; i < len(args); i++ {
		name, value, has := strings.Cut(args[i], "=")
		switch name {
		case "--bundle", "-b", "--process", "-p":
			if !has && i+1 < len(args) {
				i++
				value = args[i]
			}
			file = value
		case "--root", "--log", "--log-format", "--criu", "--rootless":
			if command == "" && !has {
				i++ // runc's own options come before the command
			}
		default:
			if command == "" && !strings.HasPrefix(name, "-") {
				command = name
			}
		}
	}
	return command, file
}

// edit takes capabilities that this process could not have out of a file, and
// adds newer ones where all others are: of the object at the path, in the OCI runtime specification's form of a process.
func edit(file string, path ...string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	// Numbers stay as they are written: device numbers and limits are large.
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var whole map[string]any
	if err := d.Decode(&whole); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	process := whole
	for _, key := range path {
		process, _ = process[key].(map[string]any)
	}
	sets, _ := process["capabilities"].(map[string]any)
	for set, list := range sets {
		names, _ := list.([]any)
		kept := []any{}
		if slices.Contains(names, any("CAP_AUDIT_READ")) { // nobody but the privileged has it
			for _, newer := range []any{"CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE"} {
				if !slices.Contains(names, newer) {
					names = append(names, newer)
				}
			}
		}
		for _, name := range names {
			if has(name) {
				kept = append(kept, name)
			}
		}
		sets[set] = kept
	}
	if text, err = json.Marshal(whole); err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o600)
}

// has says whether a capability, as "CAP_CHOWN", is in this process's bounding
// set.
func has(name any) bool {
	for number, c := range capabilities {
		if name == "CAP_"+c {
			in, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(number), 0, 0, 0)
			return err == nil && in == 1
		}
	}
	return false
}

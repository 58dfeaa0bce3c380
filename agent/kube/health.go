package kube

import (
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// health says whether a watch is up to date.
type health struct {
	what string // "pods"
	log  *slog.Logger

	// mu guards what follows.
	mu       sync.Mutex
	complete int       // lists
	since    time.Time // of the first trouble; zero while up to date
	err      string    // empty while only the end of a list is awaited
	told     string
}

// listing is called where a list begins: until it is complete, what is held
// may be old.
func (h *health) listing() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.since.IsZero() {
		h.since = time.Now()
	}
}

// connected is called where the server answered and the list is not there yet.
func (h *health) connected() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.err = ""
}

func (h *health) failed(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.since.IsZero() {
		h.since = time.Now()
	}
	h.err = oneLine(err)
	if h.told != h.err {
		h.told = h.err
		h.log.Warn("watch fails; the last state is kept", "type", h.what, "error", h.err)
	}
}

// current is called with every sign that the watch is up to date.
func (h *health) current(list bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if list {
		h.complete++
	}
	h.since, h.err = time.Time{}, ""
	if h.told != "" {
		h.told = ""
		h.log.Info("watch works again", "type", h.what)
	}
}

// lists is how many lists were complete.
func (h *health) lists() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.complete
}

// idle is called where the watch has ended, since there is nothing to watch.
func (h *health) idle() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.complete, h.since, h.err, h.told = 0, time.Time{}, "", ""
}

// trouble returns since when the watch is not up to date, and why. The time is
// zero if it is.
func (h *health) trouble() (time.Time, string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.since.IsZero() {
		return h.since, ""
	}
	err := h.err
	switch {
	case h.complete == 0 && err == "":
		err = fmt.Sprintf("not synced for %ds", int(time.Since(h.since).Seconds()))
	case h.complete == 0:
		err = fmt.Sprintf("not synced for %ds: %s", int(time.Since(h.since).Seconds()), err)
	case err == "":
		err = "the server has not ended its list"
	}
	return h.since, h.what + ": " + err
}

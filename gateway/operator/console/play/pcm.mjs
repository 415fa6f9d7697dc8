// An AudioWorklet: 16-bit samples of a microphone, in frames of 100 ms at 16 kHz.

const FRAME = 1600;

class Pcm extends AudioWorkletProcessor {
  constructor() {
    super();
    this.frame = new Int16Array(FRAME);
    this.filled = 0;
  }

  process([[samples]]) {
    for (const sample of samples || []) {
      this.frame[this.filled++] = Math.max(-1, Math.min(1, sample)) * 32767;
      if (this.filled < FRAME) continue;
      this.port.postMessage(this.frame.buffer, [this.frame.buffer]);
      this.frame = new Int16Array(FRAME);
      this.filled = 0;
    }
    return true;
  }
}

registerProcessor("pcm", Pcm);

// Browsers start no Worker from file://. An iframe takes its place, so that the search works there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.frame = frame.contentWindow
      addEventListener("message", event => {
        if (event.source === this.frame) {
          this.dispatchEvent(new MessageEvent("message", { data: event.data }))
        }
      })
      this.loaded = new Promise(resolve => { this.resolve = resolve })
      const page = this.frame.document
      page.open()
      page.write(`<script>
        postMessage = data => parent.postMessage(data, "*")
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(resolve => {
          const script = document.createElement("script")
          script.src = url
          script.onload = resolve
          document.body.append(script)
        })), Promise.resolve())
      </scr` + `ipt><body></body>`)
      page.close()
      const script = page.createElement("script")
      script.src = url
      script.onload = () => this.resolve()
      page.body.append(script)
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
